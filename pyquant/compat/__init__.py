"""Names that other projects' code and tutorials use, over pyquant's own: adaptors without logic."""
