"""Shows that a killed and resumed run equals the uninterrupted one, byte for byte."""
