//! Converts day numbers to dates of the proleptic Gregorian calendar, and back.
//!
//! The calendar repeats every 400 years, and in a year that starts in March the leap day is the
//! last day. So the month and day follow from the day of the year by arithmetic alone, without a
//! table or a loop.

const DAYS_PER_CYCLE: i64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01.
const DAYS_BEFORE_EPOCH: i64 = 719_468;

/// A calendar date. Year 0 is 1 BC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Date {
    pub(crate) year: i64,
    pub(crate) month: i64,
    pub(crate) day: i64,
}

impl Date {
    /// Returns the date `days` after 1970-01-01.
    pub(crate) fn from_days(days: i64) -> Self {
        let days = days.saturating_add(DAYS_BEFORE_EPOCH);
        let cycle = days.div_euclid(DAYS_PER_CYCLE);
        let day_of_cycle = days.rem_euclid(DAYS_PER_CYCLE);
        // Without the earlier leap days (one in 4 years, not in 100, but in 400) all years have 365
        // days.
        let leap_days = day_of_cycle / 1_460 - day_of_cycle / 36_524 + day_of_cycle / 146_096;
        let year_of_cycle = (day_of_cycle - leap_days) / 365;
        let day_of_year =
            day_of_cycle - (year_of_cycle * 365 + year_of_cycle / 4 - year_of_cycle / 100);
        // From March on, every five months have 153 days: 31, 30, 31, 30, 31.
        let month_from_march = (day_of_year * 5 + 2) / 153;
        let day = day_of_year - (month_from_march * 153 + 2) / 5 + 1;
        let (month, next_year) = if month_from_march < 10 {
            (month_from_march + 3, 0)
        } else {
            (month_from_march - 9, 1)
        };
        Self {
            year: cycle * 400 + year_of_cycle + next_year,
            month,
            day,
        }
    }

    /// Returns the days since 1970-01-01. `None` for a date that does not exist, and for years far
    /// outside of PostgreSQL's range.
    pub(crate) fn to_days(self) -> Option<i64> {
        if self.year.unsigned_abs() > 100_000_000 || !(1..=12).contains(&self.month) {
            return None;
        }
        let (year, month_from_march) = if self.month > 2 {
            (self.year, self.month - 3)
        } else {
            (self.year - 1, self.month + 9)
        };
        let (cycle, year_of_cycle) = (year.div_euclid(400), year.rem_euclid(400));
        let leap_days = year_of_cycle / 4 - year_of_cycle / 100;
        let day_of_year = (month_from_march * 153 + 2) / 5 + self.day - 1;
        let days = cycle * DAYS_PER_CYCLE + year_of_cycle * 365 + leap_days + day_of_year
            - DAYS_BEFORE_EPOCH;
        // For a day that the month does not have, the result is another date.
        (Self::from_days(days) == self).then_some(days)
    }
}

#[cfg(test)]
mod tests {
    use super::Date;

    fn days_in_month(year: i64, month: i64) -> i64 {
        match month {
            4 | 6 | 9 | 11 => 30,
            2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
            2 => 28,
            _ => 31,
        }
    }

    #[test]
    fn agrees_with_counting_day_by_day_from_401_bc_to_2401() {
        let mut expected = Date {
            year: -400,
            month: 1,
            day: 1,
        };
        let first = -865_625;
        for days in first..=157_419 {
            assert_eq!(Date::from_days(days), expected, "day {days}");
            assert_eq!(expected.to_days(), Some(days));
            expected.day += 1;
            if expected.day > days_in_month(expected.year, expected.month) {
                expected.day = 1;
                expected.month += 1;
            }
            if expected.month > 12 {
                expected.month = 1;
                expected.year += 1;
            }
        }
        assert_eq!(
            expected,
            Date {
                year: 2401,
                month: 1,
                day: 1
            }
        );
    }

    #[test]
    fn dates_that_do_not_exist() {
        for (year, month, day) in [
            (2023, 2, 29),
            (1900, 2, 29),
            (2024, 4, 31),
            (2024, 1, 0),
            (2024, 1, 32),
            (2024, 0, 1),
            (2024, 13, 1),
            (i64::MAX, 1, 1),
        ] {
            assert_eq!(Date { year, month, day }.to_days(), None);
        }
    }

    #[test]
    fn reaches_the_ends_of_the_date_type() {
        // date '4714-11-24 BC' and '5874897-12-31' are PostgreSQL's first and last.
        assert_eq!(
            Date::from_days(-2_440_588),
            Date {
                year: -4713,
                month: 11,
                day: 24
            }
        );
        assert_eq!(
            Date::from_days(2_145_042_905),
            Date {
                year: 5_874_897,
                month: 12,
                day: 31
            }
        );
    }
}
