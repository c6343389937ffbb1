"""Check of this machine (`oneloop doctor`): its hardware and dependencies, and the models that fit."""
