# Names that are not ASCII, between nodes of different encodings: schemas, tables, columns, in the
# stream, the copy, conflicts, views and errors.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Whatever the node's encoding; this file is UTF-8.
$ENV{PGCLIENTENCODING} = 'UTF8';
my $tokyo = new_node('tokyo', publication => '', init => [ '--encoding=UTF8', '--locale=C' ]);
my $paris = new_node('paris', publication => '', init => [ '--encoding=LATIN1', '--locale=C' ]);
my @both = ($tokyo, $paris);
on_all(q[
	create schema "café";
	create table "café"."Größe" ("clé" int primary key, "année" int, v text constraint "où" check (true));
	create publication "für alle" for all tables;
], @both);
$tokyo->safe_psql('postgres', q[insert into "café"."Größe" select i, 2000 + i, 'copié' from generate_series(1, 3) i]);
my $here = subscribe($paris, $tokyo, publications => q['{"für alle"}']);
my $there = subscribe($tokyo, $paris, publications => q['{"für alle"}'], copy_data => 'false');

sub rows { my ($node) = @_; return $node->safe_psql('postgres', q[select string_agg(format('%s %s %s', "clé", "année", v), ', ' order by "clé") from "café"."Größe"]); }
sub on_paris { return $paris->safe_psql('postgres', $_[0]); }

is(rows($paris), '1 2001 copié, 2 2002 copié, 3 2003 copié', 'copied');
is(on_paris(q[select relation, state from braid.subscription_tables]), q["café"."Größe"|ready], 'and shown by its name');
$tokyo->safe_psql('postgres', q[
	insert into "café"."Größe" values (4, 2004, 'inséré');
	update "café"."Größe" set v = 'changé' where "clé" = 1;
	update "café"."Größe" set "clé" = 20 where "clé" = 2;
	delete from "café"."Größe" where "clé" = 3;
]);
on_paris(q[insert into "café"."Größe" values (5, 2005, 'à paris')]);
converged(@both);
my $all = '1 2001 changé, 4 2004 inséré, 5 2005 à paris, 20 2002 copié';
is(rows($_), $all, 'each change has come, at ' . $_->name) for @both;

# A conflict, whose history has the names.
disable($paris, $here);
$tokyo->safe_psql('postgres', q[insert into "café"."Größe" values (6, 1, 'plus tôt')]);
on_paris(q[insert into "café"."Größe" values (6, 2, 'plus tard')]);
on_paris("select braid.enable_subscription('$here')");
converged(@both);
is(on_paris(q[select kind, winner, key ->> 'clé', local_row ->> 'année', remote_row ->> 'v', table_name from braid.conflict_history]),
	q[insert_exists|local|6|2|plus tôt|"café"."Größe"], 'the history of a conflict');
is(join(' ', (split /\|/, on_paris(qq[call braid.compare('$here', '"café"."Größe"')]))[ 1, 2, 3 ]), '0 0 5', 'nothing differs');

# The error that stops a subscription.
on_paris(q[alter table "café"."Größe" drop constraint "où", add constraint "où" check (v <> 'trop')]);
$tokyo->safe_psql('postgres', q[insert into "café"."Größe" values (7, 3, 'trop')]);
ok(wait_until(sub { status($paris, $here)->{state} eq 'error' }, 20), 'a constraint that is only here');
# PostgreSQL's own words: letters that are not ASCII may be shown as question marks there.
like(status($paris, $here)->{last_error}, qr/"Gr\S+e" violates check constraint "o/, 'is an error in words');
on_paris(qq[select braid.alter_subscription('$here', on_error => 'park'); select braid.enable_subscription('$here')]);
ok(wait_until(sub { on_paris(q[select count(*) from braid.parked_transactions]) eq '1' }, 20), 'its transaction is parked');
is(on_paris(q[select record #>> '{schema,namespace}', record #>> '{schema,table}', record #>> '{after,clé}' from braid.parked_changes]), 'café|Größe|7', 'with its rows');
on_paris(q[alter table "café"."Größe" drop constraint "où"]);
on_paris(qq[select braid.retry_parked('$here')]);
converged(@both);
like(rows($paris), qr/7 3 trop/, 'and applied');

# A name that the other encoding does not have.
on_paris(qq[select braid.alter_subscription('$here', on_error => 'stop')]);
$tokyo->safe_psql('postgres', q[create table "日本" (id int primary key); insert into "日本" values (1)]);
ok(wait_until(sub { status($paris, $here)->{state} eq 'error' }, 20), 'a table that cannot be here');
like(status($paris, $here)->{last_error}, qr/\?\?/, 'is an error that names it as far as it can be written here');
on_paris(qq[select braid.skip_transaction('$here', error_lsn) from braid.subscription_status where name = '$here']);
$tokyo->safe_psql('postgres', q[insert into "café"."Größe" values (8, 4, 'après')]);
ok(wait_until(sub { rows($paris) =~ /8 4 après/ }, 20), 'and goes on without it') or diag(status($paris, $here)->{last_error});

done_testing();
