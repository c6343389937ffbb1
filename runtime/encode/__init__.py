"""Media encoders: cached outputs, and scheduling of encoder work before steps."""
