"""Loading a model: sources of tensors, transforms, and layout on devices."""
