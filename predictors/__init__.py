"""Expert predictors, one per file with the predictor's name. See `moetool.training.predictor.Predictor`."""
