"""Options: one dataclass field is one, and flag, variable, key of the file, help and checks follow from it."""
