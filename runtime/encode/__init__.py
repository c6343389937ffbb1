"""Media encoders: cache of their outputs, and scheduling of their work before steps."""
