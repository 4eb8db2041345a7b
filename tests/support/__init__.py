"""What tests share: traces made by hand, recorded ones, sample reports, models."""
