"""Plans how each gradient is synchronized, and predicts whether that pays."""
