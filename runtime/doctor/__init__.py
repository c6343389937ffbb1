"""This machine as a server of models: what it has and lacks, and what would fit."""
