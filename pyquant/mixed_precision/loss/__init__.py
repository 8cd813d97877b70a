"""What a configuration loses, and how sensitive each group of layers is."""
