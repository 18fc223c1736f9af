"""What this checkout knows of its own tests."""
