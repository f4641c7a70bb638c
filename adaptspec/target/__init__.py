"""The model whose distribution is kept."""
