"""eyas trains EAGLE-3 draft models and proves them inside the serving engine."""

__version__ = "0.1.0"
