"""Whether and how a model turns its keys by position: asked of the model, and explained by its own frequencies."""
