"""Model Boss."""
