"""Sums of terms on one device, and sums across devices."""
