"""Stand-in for torchvision.transforms.v2."""
