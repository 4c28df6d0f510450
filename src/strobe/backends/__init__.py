"""How attention is computed: one module or package a backend, and the choice between them."""
