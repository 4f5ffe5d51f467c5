"""Files of models and of training states."""
