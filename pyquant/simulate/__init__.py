"""Float models that compute what their integer twins will: fake-quantising layers, for calibration and training."""
