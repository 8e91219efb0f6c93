"""What the layer can do that others cannot, one room an experiment: tracking, audio, and the demo that shows both in brief."""
