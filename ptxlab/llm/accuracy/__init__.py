"""What quantising does to a model: perplexity by step of a recipe, errors by matrix, tokens that part."""
