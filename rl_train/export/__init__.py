"""A trained checkpoint merged into its base, its model card, and loading it again."""
