"""Operations of flash-attn that other libraries import."""
