"""Classes of weights. Only these modules know how the numbers of a weight are stored."""
