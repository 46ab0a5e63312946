"""Predictors of coming experts, one a file: the file's name is the predictor's. See `moetool.predictor.Predictor`."""
