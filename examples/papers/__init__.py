"""Small trainings that show what the papers on rotary embeddings say."""
