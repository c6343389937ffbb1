"""Doctor: hardware and dependencies of this machine, and the models that fit."""
