"""A page that talks to the base and the trained model of a run side by side, with a verifier's score."""
