"""The part that is compiled outside JAX: a chain and its gradient in C++, for processors."""
