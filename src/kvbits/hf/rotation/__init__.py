"""Whether and how a model ropes its keys: asked of the model, and explained by its own frequencies."""
