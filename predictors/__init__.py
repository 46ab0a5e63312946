"""Expert predictors, one a file named as the predictor is. See `moetool.learning.predictor.Predictor`."""
