"""Fast sampling and scoring of a decoder LLM: tensors alone, no task, no image, no rank."""
