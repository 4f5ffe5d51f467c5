"""How the bytes of a delivery reach the engines: `base.Transport` and what implements it."""
