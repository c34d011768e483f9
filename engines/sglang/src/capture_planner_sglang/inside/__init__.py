"""What runs inside SGLang: a plan is applied, and what ran is observed."""
