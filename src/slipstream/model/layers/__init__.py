"""A layer's maths, each part written once: attention, MLP, residual, and the layer made of them."""
