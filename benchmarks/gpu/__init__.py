"""What the GPU's work costs, from one draft to a whole system: `python -m benchmarks.gpu`."""
