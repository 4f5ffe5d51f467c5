"""What a run says about itself: one metric schema, writers, phase times, samples, progress, batch dumps, the
summary."""
