"""Operations: kernels, launches, collectives, recorded commands and captures."""
