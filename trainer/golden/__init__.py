"""What a fit computed, recorded and compared to the bit."""
