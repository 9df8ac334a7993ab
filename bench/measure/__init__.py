"""Code that benchmarks share: ``runner`` runs one, ``clock`` measures time, ``case`` has floors."""
