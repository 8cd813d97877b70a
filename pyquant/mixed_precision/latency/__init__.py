"""What a configuration takes: layers and whole models timed, and the table that predicts."""
