"""Training frameworks: one module each, the only place that knows it. Nothing is imported until a module is named."""
