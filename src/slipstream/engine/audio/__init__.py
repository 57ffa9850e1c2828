"""Audio for speech models: files to samples, samples to spectrograms, and the windows of a transcription. No torch."""
