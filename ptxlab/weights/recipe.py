"""A model through a recipe: calibrated and quantised layer by layer, each on what the quantised ones before it give."""
