"""What the test suites share: small models, the comparison called *exact*, schedulers and servers to compare."""
