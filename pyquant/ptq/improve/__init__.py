"""What costs a user nothing but data: smoothing, bias correction, and codes that make up for each other's rounding."""
