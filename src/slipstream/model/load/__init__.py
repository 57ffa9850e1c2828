"""Loading a model: the sources of its tensors, their transforms, and the devices that hold them."""
