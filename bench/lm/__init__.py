"""Perplexity and cloze accuracy of quantised language models, beside float and beside other packages."""
