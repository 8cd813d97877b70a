"""Vocabulary of pyquant: code types, granularities, schemes, carriers, bounds. Knows torch.Tensor and nothing else."""
