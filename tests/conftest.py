import hypothesis

# Examples take as long as the machine lets them: a deadline would only measure its load.
hypothesis.settings.register_profile("ptxlab", deadline=None)
hypothesis.settings.load_profile("ptxlab")
