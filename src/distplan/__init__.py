"""distplan: plan the parallel training of large models on clusters."""

__version__ = "0.1.0"
