"""Known values of small models, computed in float64 from formulas and from no snapshot."""
